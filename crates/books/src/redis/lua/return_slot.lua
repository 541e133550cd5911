-- slot, maker
local slot = ARGV[2]
local got = call('HMGET', books, 'g', 'r' .. slot)
if not at_home(got[1]) then return 'elsewhere' end
local r = unpacked(got[2])
if not r or r[SANDBOX] ~= '' or r[MAKER] ~= ARGV[3] then return finish('unknown') end
remove(slot, r, 'never-made')
return finish('done')
