function verbs.begin_wake(slot)
  local r = record_of(slot)
  local others = g[AWAKE_ALL] - (r and r[AWAKE] == '1' and 1 or 0)
  if others >= AWAKE_MAX then return finish('no-wake-budget') end
  if not r or r[CONDEMNED_AT] == '' then return finish('unknown') end
  if r[AWAKE] ~= '1' then
    r[AWAKE], g[AWAKE_ALL], g_changed = '1', g[AWAKE_ALL] + 1, true
    put(slot, r)
  end
  return finish('wake')
end
