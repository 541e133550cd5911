-- open | append | claim | forget, run, writer, then what each needs
-- KEYS: the books, the log's head, its entries, the set of those that have not ended
local log, entries, unfinished = KEYS[2], KEYS[3], KEYS[4]
local act, run, writer = ARGV[1], ARGV[2], ARGV[3]
local at = string.format('%.0f', now)
local got = redis.call('HMGET', log, 'writer', 'heard', 'ended', 'last', 'bytes')
if act == 'open' then
  if got[1] then return 'exists' end
  redis.call('HSET', log, 'head', ARGV[4], 'writer', writer, 'heard', at, 'ended', '', 'last', '0', 'bytes', '0')
  redis.call('SADD', unfinished, run)
  return 'new'
end
if not got[1] then return 'lost' end
if act == 'claim' then
  -- then: for how long it must not have been heard
  if got[3] ~= '' or got[1] ~= writer and now - got[2] < ARGV[4] + 0 then return 'not-writer' end
  redis.call('HSET', log, 'writer', writer, 'heard', at)
  return 'done'
end
if got[1] ~= writer then return 'not-writer' end
if act == 'forget' then
  redis.call('DEL', log, entries)
  redis.call('SREM', unfinished, run)
  return 'done'
end
-- append, then: after, whether it ends, the new head or nothing, and the entries
local last, after, new, ends = got[4] + 0, ARGV[4] + 0, #ARGV - 6, ARGV[5] == '1'
if last == after + new and new > 0 then return 'done' end
if last < after then return 'lost' end
if last > after or got[3] ~= '' then return 'not-writer' end
local bytes = got[5] + 0
for i = 7, #ARGV do bytes = bytes + #ARGV[i] end
if new > 0 and not ends and (after + new > ENTRIES_MAX or bytes > LOG_BYTES_MAX) then return 'full' end
for i = 7, #ARGV do redis.call('RPUSH', entries, ARGV[i]) end
redis.call('HSET', log, 'heard', at, 'last', string.format('%.0f', after + new), 'bytes', string.format('%.0f', bytes))
if ARGV[6] ~= '' then redis.call('HSET', log, 'head', ARGV[6]) end
if ends then
  redis.call('HSET', log, 'ended', at)
  redis.call('SREM', unfinished, run)
  redis.call('PEXPIRE', log, ENDED_KEPT)
  redis.call('PEXPIRE', entries, ENDED_KEPT)
end
return 'done'
