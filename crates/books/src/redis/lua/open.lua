-- A replica meets this server: the books begin here, go on, or may have lost their last writes.
-- server, global cap, whether the replica has seen the books before
local books = KEYS[1]
local at = string.format('%.0f', now)
local text = redis.call('HGET', books, 'g')
local g
if text then
  g = {string.match(text, COMMON_PATTERN)}
else
  g = {'0', '0', '0', '0', '', '', ARGV[1], '0'}
  if ARGV[3] == '1' then g[SETTLING] = at end
end
if g[SERVER] ~= ARGV[1] then
  for _, bucket in ipairs(redis.call('HKEYS', books .. ':n')) do redis.call('DEL', books .. ':q:' .. bucket) end
  redis.call('DEL', books .. ':w', books .. ':h', books .. ':n')
  g[SERVER], g[SETTLING], g[WAITING] = ARGV[1], at, '0'
end
g[CAP] = ARGV[2]
redis.call('HSET', books, 'g', table.concat(g, ' '))
return g[SETTLING]
