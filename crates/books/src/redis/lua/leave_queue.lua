-- slot
local slot = ARGV[2]
if not at_home(call('HGET', books, 'g')) then return 'elsewhere' end
local mine = call('HGET', books .. ':w', slot)
if mine then leave(slot, match(mine, '^([^ ]*)')) end
return finish('done')
