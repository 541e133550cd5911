-- slot, sandbox, evidence
local slot = ARGV[2]
local got = call('HMGET', books, 'g', 'r' .. slot)
if not at_home(got[1]) then return 'elsewhere' end
local r = unpacked(got[2])
if not r or r[SANDBOX] ~= ARGV[3] then return finish('unknown') end
if r[CONDEMNED_AT] == '' and ARGV[4] ~= 'not-found' then return finish('refused', 'no-ground') end
remove(slot, r, ARGV[4])
return finish('done')
