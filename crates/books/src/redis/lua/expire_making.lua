-- slot
local slot = ARGV[2]
local got = call('HMGET', books, 'g', 'r' .. slot)
if not at_home(got[1]) then return 'elsewhere' end
local r = unpacked(got[2])
if not r then return finish('unknown') end
if r[SANDBOX] ~= '' or r[MAKER] ~= '' and since(r[MAKING_SINCE]) < SETTLE then return finish('refused', 'grey') end
remove(slot, r, 'never-made')
return finish('done')
