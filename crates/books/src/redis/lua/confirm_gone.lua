function verbs.confirm_gone(slot, sandbox, evidence)
  local r = record_of(slot)
  if not r or r[SANDBOX] ~= sandbox then return finish('unknown') end
  if r[CONDEMNED_AT] == '' and evidence ~= 'not-found' then return finish('refused', 'no-ground') end
  remove(slot, r, evidence)
  return finish('done')
end
