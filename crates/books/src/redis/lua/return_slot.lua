function verbs.return_slot(slot, maker)
  local r = record_of(slot)
  if not r or r[SANDBOX] ~= '' or r[MAKER] ~= maker then return finish('unknown') end
  remove(slot, r, 'never-made')
  return finish('done')
end
