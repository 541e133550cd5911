function verbs.bind(slot, generation, sandbox, ends_at)
  local r = record_of(slot)
  if not r or r[SANDBOX] ~= '' and r[SANDBOX] ~= sandbox then return finish('unknown') end
  local by_its_maker = r[GENERATION] == generation or r[CONDEMNED_GENERATION] == generation
  if r[SANDBOX] == '' and not by_its_maker then return finish('unknown') end
  if r[SANDBOX] == '' then
    r[SANDBOX], r[ENDS_AT] = sandbox, ends_at
    if r[MANAGED] == 'direct' then r[OWNER] = r[BUCKET] .. ':direct:' .. sandbox end
    call('SET', books .. ':s:' .. sandbox, slot)
  elseif r[MANAGED] == 'direct' then
    r[ENDS_AT] = ends_at
  end
  r[MAKER], r[MAKING_SINCE], r[SEEN_AT] = '', '', at
  if r[CONDEMNED_AT] ~= '' then
    put(slot, r)
    return finish('refused', 'condemned')
  end
  if r[GENERATION] ~= generation then
    put(slot, r)
    return finish('stale', r[GENERATION])
  end
  if r[LEASE] == '' then
    put(slot, r)
    return finish(r[MANAGED] == 'direct' and 'done' or 'unknown')
  end
  r[LEASE_BEAT] = at
  put(slot, r)
  return granted(slot, r)
end
