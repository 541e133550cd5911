-- What every verb works with. Names in capitals are numbers that the loader puts in: places in a packed
-- value, and the rules. What steps read is read once for all of them and kept here; what they change is
-- written down in one go when the last is done.
local call, match, find, sub, gsub = redis.call, string.match, string.find, string.sub, string.gsub
local concat, format = table.concat, string.format
local books = KEYS[1]

local at = format('%.0f', now)
local g, g_changed = nil, false
local buckets, lines, records = {}, {}, {}
local changed, touched = {}, {}
local gone = {}
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

-- The record of a slot, or false.
local function record_of(slot)
  local r = records[slot]
  if r == nil then
    r = unpacked(call('HGET', books, 'r' .. slot))
    records[slot] = r
  end
  return r
end

-- A bucket; one that was never set has no quota and counts all the same.
local function bucket_of(bucket)
  local b = buckets[bucket]
  if not b then
    b = {match(call('HGET', books, 'b' .. bucket) or '  0', BUCKET_PATTERN)}
    buckets[bucket] = b
  end
  return b
end

local function line_from(key, text)
  local l = {key = key, known = text and true or false}
  l.current, l.sealed = match(text or '', '^([^\t]*)(.*)$')
  lines[key] = l
  return l
end

local function touch(l)
  l.known = true
  if not l.touched then
    l.touched = true
    touched[#touched + 1] = l
  end
end

local function put(slot, r)
  records[slot] = r
  changed[slot] = true
end

local function tell(slot, r, what, one, two)
  tales[#tales + 1] = concat({slot, at, r[BUCKET], r[OWNER], r[SANDBOX], r[GENERATION], what, one or '', two or ''}, ' ')
  tale_of[#tales] = slot
end

-- Counts how many places of a bucket, and of all, are filled.
local function count(bucket, by)
  local b = bucket_of(bucket)
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

-- Ends a step: its trail is written, what it changed waits for the others.
local function finish(...)
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
    if gone[i + 1] == '' then
      -- Nothing was made, so nobody can ask for it.
      call('DEL', books .. ':a:' .. gone[i])
    else
      call('PEXPIRE', books .. ':a:' .. gone[i], AUDIT_KEPT)
      call('PEXPIRE', books .. ':s:' .. gone[i + 1], AUDIT_KEPT)
    end
  end
  local said = concat({at, ...}, ' ') .. '\n' .. concat(tales, '\n')
  if #gone > 0 then gone = {} end
  if #tales > 0 then tales, tale_of = {}, {} end
  return said
end

-- Writes down what the steps changed.
local function write_down()
  local set, del = {}, {}
  for slot in pairs(changed) do
    local r = records[slot]
    if r then
      set[#set + 1] = 'r' .. slot
      set[#set + 1] = concat(r, ' ')
    else
      del[#del + 1] = 'r' .. slot
    end
  end
  for bucket, b in pairs(buckets) do
    if b.changed then
      set[#set + 1] = 'b' .. bucket
      set[#set + 1] = concat(b, ' ')
      b.changed = false
    end
  end
  if g_changed then
    set[#set + 1] = 'g'
    set[#set + 1] = concat(g, ' ')
    g_changed = false
  end
  if #set > 0 then call('HSET', books, unpack(set)) end
  if #del > 0 then call('HDEL', books, unpack(del)) end
  for _, l in ipairs(touched) do
    l.touched = false
    if l.current ~= '' then
      call('SET', l.key, l.current .. l.sealed)
    else
      call('SET', l.key, l.sealed, 'PX', LINE_KEPT)
    end
  end
  changed, touched = {}, {}
end
