function verbs.discard(slot, generation)
  local r = record_of(slot)
  if not r then return finish('unknown') end
  if r[CONDEMNED_AT] ~= '' then return finish('done') end
  if r[GENERATION] ~= generation then return finish('stale', r[GENERATION]) end
  condemn(slot, r, '', 'never-used')
  return finish('done')
end
