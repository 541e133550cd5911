function verbs.release(bucket, owner, lease)
  local l = line_of(bucket, owner)
  if not l.known then return finish('unknown') end
  if sealed_how(l, lease) == 'r' then return finish('released', '') end
  local slot = l.current
  local r = slot ~= '' and record_of(slot)
  if not r or r[LEASE] ~= lease then
    -- It seals that one generation and never falls back to the current one.
    seal(l, lease, 'm')
    touch(l)
    return finish('stale', r and r[GENERATION] or '')
  end
  condemn(slot, r, '', 'released')
  return finish('released', slot)
end
