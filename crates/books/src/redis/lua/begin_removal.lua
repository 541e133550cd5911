-- slot, generation, by, ground, seen
local slot, by, ground = ARGV[2], ARGV[4], ARGV[5]
local got = call('HMGET', books, 'g', 'r' .. slot)
if not at_home(got[1]) then return 'elsewhere' end
local r = unpacked(got[2])
if not r then return finish('unknown') end
if r[CONDEMNED_AT] == '' then
  -- The last look, in the same step as the condemnation.
  if g[SETTLING] ~= '' then return finish('refused', 'recovering') end
  if r[GENERATION] ~= ARGV[3] then return finish('refused', 'generation-changed') end
  local b = {match(call('HGET', books, 'b' .. r[BUCKET]) or '  0', BUCKET_PATTERN)}
  local found, colour = verdict(r, ARGV[6], b[RETENTION])
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
