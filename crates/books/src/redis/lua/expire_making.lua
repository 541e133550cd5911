function verbs.expire_making(slot)
  local r = record_of(slot)
  if not r then return finish('unknown') end
  if r[SANDBOX] ~= '' or r[MAKER] ~= '' and since(r[MAKING_SINCE]) < SETTLE then return finish('refused', 'grey') end
  remove(slot, r, 'never-made')
  return finish('done')
end
