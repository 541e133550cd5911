-- slot
local slot = ARGV[2]
local mine = call('HGET', books .. ':w', slot)
if mine then leave(slot, match(mine, '^([^ ]*)')) end
return finish('done')
