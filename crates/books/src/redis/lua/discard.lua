-- slot, generation
local slot = ARGV[2]
local r = record_of(slot)
if not r then return finish('unknown') end
if r[CONDEMNED_AT] ~= '' then return finish('done') end
if r[GENERATION] ~= ARGV[3] then return finish('stale', r[GENERATION]) end
condemn(slot, r, '', 'never-used')
return finish('done')
