-- slot, sandbox, evidence
local slot = ARGV[2]
local r = record_of(slot)
if not r or r[SANDBOX] ~= ARGV[3] then return finish('unknown') end
if r[CONDEMNED_AT] == '' and ARGV[4] ~= 'not-found' then return finish('refused', 'no-ground') end
remove(slot, r, ARGV[4])
return finish('done')
