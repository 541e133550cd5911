-- What every verb begins and ends with. Names in capitals are numbers that the loader puts in: places
-- in a packed value, and the rules. Everything is read first and written at the end in one go.
local call, match, find, sub, gsub = redis.call, string.match, string.find, string.sub, string.gsub
local concat, format = table.concat, string.format
local books = KEYS[1]

local at = format('%.0f', now)
local g, g_changed = nil, false
local buckets, lines = {}, {}
local changed, gone = {}, {}
local tales, tale_of = {}, {}

local function int(n) return format('%.0f', n) end

local function since(earlier)
  local age = now - earlier
  if age > 0 then return age end
  return 0
end

-- Whether this server is the one that the books belong to; another may have lost their last writes.
local function at_home(text)
  if not text then return false end
  g = {match(text, COMMON_PATTERN)}
  return g[SERVER] == ARGV[1]
end

local function unpacked(text) return text and {match(text, RECORD_PATTERN)} end

local function record_of(slot) return unpacked(call('HGET', books, 'r' .. slot)) end

local function put(slot, r)
  changed[#changed + 1] = 'r' .. slot
  changed[#changed + 1] = concat(r, ' ')
end

local function tell(slot, r, what, one, two)
  tales[#tales + 1] = concat({slot, at, r[BUCKET], r[OWNER], r[SANDBOX], r[GENERATION], what, one or '', two or ''}, ' ')
  tale_of[#tales] = slot
end

-- Counts how many places of a bucket, and of all, are filled.
local function count(bucket, by)
  local b = buckets[bucket]
  if not b then
    b = {match(call('HGET', books, 'b' .. bucket) or '  0', BUCKET_PATTERN)}
    buckets[bucket] = b
  end
  b[USED_HERE] = int(b[USED_HERE] + by)
  g[USED] = int(g[USED] + by)
  b.changed, g_changed = true, true
end

-- A generation that was never granted before: a counter that never runs behind this server's clock.
local function mint()
  local generation = g[NEWEST] + 1
  if now > generation then generation = now end
  g[NEWEST] = int(generation)
  g_changed = true
  return g[NEWEST]
end

local function finish(...)
  for bucket, b in pairs(buckets) do
    if b.changed then
      changed[#changed + 1] = 'b' .. bucket
      changed[#changed + 1] = concat(b, ' ')
    end
  end
  if g_changed then
    changed[#changed + 1] = 'g'
    changed[#changed + 1] = concat(g, ' ')
  end
  if #changed > 0 then call('HSET', books, unpack(changed)) end
  for key, l in pairs(lines) do
    if l.changed and l.current ~= '' then
      call('SET', key, l.current .. l.sealed)
    elseif l.changed then
      call('SET', key, l.sealed, 'PX', LINE_KEPT)
    end
  end
  local tale, unmade = 1, gone[2] == '' and gone[1]
  while tale <= #tales do
    local last = tale
    while tale_of[last + 1] == tale_of[tale] do last = last + 1 end
    if tale_of[tale] ~= unmade then
      call('APPEND', books .. ':a:' .. tale_of[tale], concat(tales, '\n', tale, last) .. '\n')
    end
    tale = last + 1
  end
  for i = 1, #gone, 2 do
    call('HDEL', books, 'r' .. gone[i])
    if gone[i + 1] == '' then
      -- Nothing was made, so nobody can ask for it.
      call('DEL', books .. ':a:' .. gone[i])
    else
      call('PEXPIRE', books .. ':a:' .. gone[i], AUDIT_KEPT)
      call('PEXPIRE', books .. ':s:' .. gone[i + 1], AUDIT_KEPT)
    end
  end
  return concat({at, ...}, ' ') .. '\n' .. concat(tales, '\n')
end
