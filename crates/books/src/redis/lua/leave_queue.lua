function verbs.leave_queue(slot)
  local mine = call('HGET', books .. ':w', slot)
  if mine then leave(slot, match(mine, '^(%S*)')) end
  return finish('done')
end
