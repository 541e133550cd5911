-- slot, by, awake
local slot = ARGV[2]
local r = record_of(slot)
if not r then return finish('unknown') end
if r[LOCK_BY] == ARGV[3] then r[LOCK_BY], r[LOCK_AT] = '', '' end
if r[CONDEMNED_AT] ~= '' then
  r[FAILURES] = int(math.min(r[FAILURES] + 1, 4294967295))
  if r[AWAKE] ~= ARGV[4] then
    g[AWAKE_ALL], g_changed = int(g[AWAKE_ALL] + (ARGV[4] == '1' and 1 or -1)), true
    r[AWAKE] = ARGV[4]
  end
end
-- The best effort was made; the account is released, the sandbox is still removed.
if r[COUNTED] == '1' and is_overdue(r) then
  r[COUNTED] = '0'
  count(r[BUCKET], -1)
  tell(slot, r, 'written-off')
end
put(slot, r)
return finish('done')
