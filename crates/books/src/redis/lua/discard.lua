-- slot, generation
local slot = ARGV[2]
local got = call('HMGET', books, 'g', 'r' .. slot)
if not at_home(got[1]) then return 'elsewhere' end
local r = unpacked(got[2])
if not r then return finish('unknown') end
if r[CONDEMNED_AT] ~= '' then return finish('done') end
if r[GENERATION] ~= ARGV[3] then return finish('stale', r[GENERATION]) end
condemn(slot, r, '', 'never-used')
return finish('done')
