-- The queue: one order for all buckets; whoever is not heard loses its place.
--   :w   slot -> bucket, since, sequence     :h   slots by when they were last heard
--   :n   bucket -> how many wait             :q:… slots of a bucket by sequence
local function leave(slot, bucket)
  call('HDEL', books .. ':w', slot)
  call('ZREM', books .. ':h', slot)
  call('ZREM', books .. ':q:' .. bucket, slot)
  if call('HINCRBY', books .. ':n', bucket, -1) <= 0 then call('HDEL', books .. ':n', bucket) end
  g[WAITING] = int(g[WAITING] - 1)
  g_changed = true
end

local function drop_silent(own)
  for _, slot in each(call('ZRANGEBYSCORE', books .. ':h', '-inf', int(now - SILENCE))) do
    if slot ~= own then leave(slot, match(call('HGET', books .. ':w', slot), '^(%S*)')) end
  end
end

local function free_in(b)
  local free = b[QUOTA] - b[USED_HERE]
  if free > 0 then return free end
  return 0
end

-- How many of those before `sequence` their own buckets would admit now.
local function admissible_before(sequence)
  local admissible = 0
  for _, bucket in each(call('HKEYS', books .. ':n')) do
    local before = call('ZCOUNT', books .. ':q:' .. bucket, '-inf', '(' .. sequence)
    admissible = admissible + least(free_in(bucket_of(bucket)), before)
  end
  return admissible
end

-- Nothing if the slot may be taken now; else what is said, with a place in the queue if it waits.
-- `own` is what has the slot already.
local function admit(own, slot, bucket)
  local b = bucket_of(bucket)
  if b[QUOTA] == '' then return finish('unknown-bucket') end
  if g[SETTLING] ~= '' then return finish('recovering') end
  if own then return finish('busy') end
  local mine, ahead, admissible = false, 0, 0
  local begun, sequence = at, g[SEQUENCE]
  if g[WAITING] ~= '0' then
    mine = call('HGET', books .. ':w', slot)
    local other
    if mine then
      other, begun, sequence = match(mine, '^(%S*) (%S*) (%S*)$')
      if other ~= bucket then return finish('busy') end
    end
    drop_silent(slot)
    ahead = call('ZCOUNT', books .. ':q:' .. bucket, '-inf', '(' .. sequence)
    if g[CAP] ~= '' then admissible = admissible_before(sequence) end
  end
  local room = free_in(b) > ahead
  if room and g[CAP] ~= '' then room = g[CAP] - g[USED] > admissible end
  if room then
    if mine then leave(slot, bucket) end
    return nil
  end
  if since(begun) >= WAIT_MAX then
    if mine then leave(slot, bucket) end
    return finish('capacity', free_in(b) == 0 and 'bucket' or 'global')
  end
  if not mine then
    call('HSET', books .. ':w', slot, concat({bucket, at, sequence}, ' '))
    call('ZADD', books .. ':q:' .. bucket, sequence, slot)
    call('HINCRBY', books .. ':n', bucket, 1)
    g[SEQUENCE], g[WAITING], g_changed = int(sequence + 1), int(g[WAITING] + 1), true
  end
  call('ZADD', books .. ':h', at, slot)
  return finish('waiting', int(ahead))
end
