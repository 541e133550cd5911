-- slot, maker
local slot = ARGV[2]
local r = record_of(slot)
if not r or r[SANDBOX] ~= '' or r[MAKER] ~= ARGV[3] then return finish('unknown') end
remove(slot, r, 'never-made')
return finish('done')
