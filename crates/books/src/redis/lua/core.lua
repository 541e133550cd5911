-- What every verb works with. Names in capitals are numbers that the loader puts in: places in a packed
-- value, and the rules. All of this is made once, when the server loads it; what belongs to one call is
-- set anew by `begin`. What steps read is kept here for the steps behind them; what they change is
-- written down in one go when the last is done.
--
-- What the server has for those that run; there is nothing of it yet while this is loaded.
local call, match, find, sub, gsub, concat, format, values_of, each, every, any, least, most
-- How the line of a new record ends, behind the last part that differs.
local end_of_leased, end_of_direct
local function borrow()
  call, values_of, each, every, any, least, most = redis.call, unpack, ipairs, pairs, next, math.min, math.max
  match, find, sub, gsub, format, concat = string.match, string.find, string.sub, string.gsub, string.format, table.concat
  local rep = string.rep
  local ends = FAR_FUTURE_TEXT .. rep(' ', COUNTED - ENDS_AT) .. '1'
  end_of_leased, end_of_direct = rep(' ', ENDS_AT - LEASE_BEAT) .. ends, rep(' ', ENDS_AT - MAKING_SINCE) .. ends
  -- Little is kept here and much is thrown away: going through the little for every bit of the much would
  -- cost a fifth of a call.
  collectgarbage('setpause', 1000)
end

local books, now, at
local g, g_changed
-- The line that `g` was taken apart from, or put together to: whoever finds it as it was left need not
-- take it apart again. None while the parts may be others than the line.
local g_text
local buckets, lines, records
-- What changed: by bucket, by slot (as its new line, if that is all there is), and the lines one after
-- the other.
local buckets_changed, records_changed, lines_changed
-- Trails: what to add by slot, which to delete, which to keep for a while only.
local trails, forgotten, fading = {}, {}, {}
-- What the step tells, each entry behind a line break: all of it, and the last of it, of one slot.
local told, telling, told_of
local verbs = {}

local function begin(KEYS)
  if not call then borrow() end
  books, now = KEYS[1], clock(KEYS)
  at = format('%d', now)
  g_changed = false
  buckets, lines, records = {}, {}, {}
  buckets_changed, records_changed, lines_changed = {}, {}, {}
  if any(trails) then trails = {} end
  if forgotten[1] then forgotten = {} end
  if fading[1] then fading = {} end
  told, telling = '', ''
end

local function int(n) return format('%d', n) end

local function since(earlier)
  local age = now - earlier
  if age > 0 then return age end
  return 0
end

-- Whether this server is the one that the books belong to; another may have lost their last writes.
local function at_home(server)
  local text = call('HGET', books, 'g')
  if not text then g = nil end
  if text and text ~= g_text then g = {match(text, COMMON_PATTERN)} end
  g_text = nil
  return g and g[SERVER] == server
end

local function unpacked(text) return text and {match(text, RECORD_PATTERN)} end

-- The record of a slot, or false.
local function record_of(slot)
  local r = records[slot]
  if r == nil then
    r = unpacked(records_changed[slot] or call('HGET', books, 'r' .. slot))
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

-- Its new line is told, and not yet taken apart.
local function put_line(slot, line)
  records[slot] = nil
  records_changed[slot] = line
end

local function put(slot, r)
  records[slot] = r
  records_changed[slot] = true
end

local function joined(before, text)
  if before and before ~= '' then return before .. text end
  return text
end

-- Adds what is told of a slot to its trail.
local function keep_telling()
  if telling == '' then return end
  trails[told_of] = joined(trails[told_of], telling)
  told, telling = joined(told, telling), ''
end

local function tell_entry(slot, entry)
  if slot ~= told_of then
    keep_telling()
    told_of = slot
  end
  telling = joined(telling, entry)
end

local function tell(slot, r, what, one, two)
  tell_entry(slot, '\n' .. slot .. ' ' .. at .. ' ' .. r[BUCKET] .. ' ' .. r[OWNER] .. ' ' .. r[SANDBOX] .. ' '
    .. r[GENERATION] .. ' ' .. what .. ' ' .. one .. ' ' .. two)
end

-- Of what was never made nobody can ask for the trail.
local function forget_trail(slot)
  told, telling = joined(told, telling), ''
  trails[slot] = nil
  forgotten[#forgotten + 1] = books .. ':a:' .. slot
end

-- Counts how many places of a bucket, and of all, are filled.
local function count(bucket, by)
  local b = bucket_of(bucket)
  b[USED_HERE] = b[USED_HERE] + by
  g[USED] = g[USED] + by
  buckets_changed[bucket], g_changed = true, true
end

-- A generation that was never granted before: a counter that never runs behind this server's clock.
local function mint()
  local generation = g[NEWEST] + 1
  g[NEWEST] = now > generation and at or int(generation)
  g_changed = true
  return g[NEWEST]
end

-- Ends a step: what it answers, and what it tells. What it changed waits for the others.
local function finish(what, one, two)
  keep_telling()
  local said
  if two then
    said = at .. ' ' .. what .. ' ' .. one .. ' ' .. two .. told
  elseif one then
    said = at .. ' ' .. what .. ' ' .. one .. told
  else
    said = at .. ' ' .. what .. told
  end
  told = ''
  return said
end

local function write_down_trails()
  if #forgotten > 0 then call('DEL', values_of(forgotten)) end
  for slot, text in every(trails) do call('APPEND', books .. ':a:' .. slot, text) end
  for _, key in each(fading) do call('PEXPIRE', key, AUDIT_KEPT) end
end

local function write_down_lines()
  local set = {}
  for _, l in each(lines_changed) do
    if l.current ~= '' then
      set[#set + 1] = l.key
      set[#set + 1] = l.current .. l.sealed
    else
      call('SET', l.key, l.sealed, 'PX', LINE_KEPT)
    end
  end
  if set[1] then call('MSET', values_of(set)) end
end

-- Writes down what the steps changed.
local function write_down()
  local set, del, common = {}, {}, g_changed and concat(g, ' ')
  for slot, line in every(records_changed) do
    local r = records[slot]
    if r ~= false then
      set[#set + 1] = 'r' .. slot
      set[#set + 1] = r and concat(r, ' ') or line
    else
      del[#del + 1] = 'r' .. slot
    end
  end
  for bucket in every(buckets_changed) do
    set[#set + 1] = 'b' .. bucket
    set[#set + 1] = concat(buckets[bucket], ' ')
  end
  if g_changed then
    set[#set + 1] = 'g'
    set[#set + 1] = common
  end
  if #set > 0 then call('HSET', books, values_of(set)) end
  if #del > 0 then call('HDEL', books, values_of(del)) end
  write_down_trails()
  write_down_lines()
  g_text = common or nil
end
