-- A clock that a test moves.
local now = tonumber(redis.call('GET', KEYS[1] .. ':clock'))
