-- slot, seen: it renews no root
local slot = ARGV[2]
local r = record_of(slot)
if not r then return finish('unknown') end
r[SEEN_AT] = at
if ARGV[3] == 'running' then
  r[PAUSED_SINCE] = ''
elseif ARGV[3] == 'paused' and r[PAUSED_SINCE] == '' then
  r[PAUSED_SINCE] = at
end
put(slot, r)
return finish('done')
