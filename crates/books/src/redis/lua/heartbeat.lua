function verbs.heartbeat(bucket, owner, lease, generation, ends_at)
  local l = line_of(bucket, owner)
  if l.current == '' then return finish('stale', '') end
  local slot = l.current
  local r = record_of(slot)
  if not r then return finish('unknown') end
  if r[GENERATION] ~= generation or r[LEASE] ~= lease or r[CONDEMNED_AT] ~= '' then
    return finish('stale', r[GENERATION])
  end
  if r[SANDBOX] == '' then return finish('being-made') end
  if g[SETTLING] ~= '' and since(r[LEASE_BEAT]) >= r[TTL] + 0 then return finish('recovering') end
  r[LEASE_BEAT] = at
  -- Never shortens a life.
  if ends_at ~= '' and ends_at + 0 > r[ENDS_AT] + 0 then r[ENDS_AT] = ends_at end
  put(slot, r)
  return granted(slot, r)
end
