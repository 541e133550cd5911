-- begin | beat | claim | cancel | end | lock | unlock; `last` is the generation, or what to keep
function verbs.run(act, slot, run, replica, last)
  local r = record_of(slot)
  if act == 'unlock' then
    if not r then return finish('unknown') end
    if r[LOCK_BY] == replica then
      r[LOCK_BY], r[LOCK_AT] = '', ''
      put(slot, r)
    end
    return finish('done')
  end
  if not r or r[CONDEMNED_AT] ~= '' or r[SANDBOX] == '' then return finish('unknown') end
  if act == 'lock' then
    if r[LOCK_BY] ~= '' and r[LOCK_BY] ~= replica and since(r[LOCK_AT]) < BLACK then return finish('busy') end
    r[LOCK_BY], r[LOCK_AT] = replica, at
    put(slot, r)
    return finish('done')
  end
  if act == 'begin' then
    if r[GENERATION] ~= last or r[LEASE] == '' then return finish('stale', r[GENERATION]) end
    if r[RUN] ~= '' and (r[RUN] ~= run or r[RUN_REPLICA] ~= replica) then return finish('busy') end
    if r[RUN] == '' then
      r[RUN], r[RUN_REPLICA], r[RUN_BEAT], r[RUN_CANCELLED] = run, replica, at, '0'
      put(slot, r)
    end
    return finish('goes-on', '0')
  end
  if act == 'beat' and r[GENERATION] ~= last then return finish('stale', r[GENERATION]) end
  if r[RUN] ~= run then return finish('unknown') end
  if act == 'cancel' then
    r[RUN_CANCELLED] = '1'
    put(slot, r)
    return finish('done')
  end
  if act == 'end' then
    if r[RUN_REPLICA] ~= replica then return finish('unknown') end
    end_run(r)
    if last == 'nothing' then
      condemn(slot, r, '', 'released')
      return finish('released', slot)
    end
    put(slot, r)
    return finish('done')
  end
  if act == 'beat' then
    if r[RUN_REPLICA] ~= replica then return finish('busy') end
    if g[SETTLING] ~= '' and since(r[RUN_BEAT]) >= BLACK then return finish('recovering') end
    if r[LEASE] ~= '' then r[LEASE_BEAT] = at end
  else
    if r[RUN_REPLICA] ~= replica and since(r[RUN_BEAT]) < BLACK then return finish('busy') end
    r[RUN_REPLICA] = replica
  end
  r[RUN_BEAT] = at
  put(slot, r)
  return finish('goes-on', r[RUN_CANCELLED])
end
