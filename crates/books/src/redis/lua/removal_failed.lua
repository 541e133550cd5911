function verbs.removal_failed(slot, by, awake)
  local r = record_of(slot)
  if not r then return finish('unknown') end
  if r[LOCK_BY] == by then r[LOCK_BY], r[LOCK_AT] = '', '' end
  if r[CONDEMNED_AT] ~= '' then
    r[FAILURES] = int(least(r[FAILURES] + 1, 4294967295))
    if r[AWAKE] ~= awake then
      g[AWAKE_ALL], g_changed = g[AWAKE_ALL] + (awake == '1' and 1 or -1), true
      r[AWAKE] = awake
    end
  end
  -- The best effort was made; the account is released, the sandbox is still removed.
  if r[COUNTED] == '1' and is_overdue(r) then
    r[COUNTED] = '0'
    count(r[BUCKET], -1)
    tell(slot, r, 'written-off', '', '')
  end
  put(slot, r)
  return finish('done')
end
