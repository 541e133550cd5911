-- highest, settled_from
if g[SETTLING] == '' then return finish('done') end
local from = math.min(g[SETTLING] + SETTLE, FAR_FUTURE)
local settled = ARGV[3] + 0 >= from
write_down()
local all = call('HGETALL', books)
for i = 1, #all, 2 do
  if sub(all[i], 1, 1) == 'r' then
    local r = unpacked(all[i + 1])
    if r[SANDBOX] == '' or r[SEEN_AT] == '' or r[SEEN_AT] + 0 < from then settled = false end
  end
end
if not settled then return finish('recovering') end
g[NEWEST] = int(math.max(g[NEWEST], ARGV[2], now))
g[SETTLING], g_changed = '', true
return finish('done')
