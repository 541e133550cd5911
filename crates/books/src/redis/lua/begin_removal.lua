function verbs.begin_removal(slot, generation, by, ground, seen)
  local r = record_of(slot)
  if not r then return finish('unknown') end
  if r[CONDEMNED_AT] == '' then
    -- The last look, in the same step as the condemnation.
    if g[SETTLING] ~= '' then return finish('refused', 'recovering') end
    if r[GENERATION] ~= generation then return finish('refused', 'generation-changed') end
    local found, colour = verdict(r, seen, bucket_of(r[BUCKET])[RETENTION])
    if found ~= ground then
      if found or colour == 'white' then return finish('refused', 'no-ground') end
      return finish('refused', colour)
    end
    condemn(slot, r, by, ground)
  end
  if r[LOCK_BY] ~= '' and r[LOCK_BY] ~= by and since(r[LOCK_AT]) < BLACK then return finish('refused', 'locked') end
  r[LOCK_BY], r[LOCK_AT] = by, at
  put(slot, r)
  return finish('remove', r[GENERATION])
end
