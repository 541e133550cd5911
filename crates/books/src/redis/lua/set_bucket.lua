-- bucket, quota, retention
local bucket = ARGV[2]
local got = call('HMGET', books, 'g', 'b' .. bucket)
if not at_home(got[1]) then return 'elsewhere' end
local b = {match(got[2] or '  0', BUCKET_PATTERN)}
b[QUOTA], b[RETENTION], b.changed = ARGV[3], ARGV[4], true
buckets[bucket] = b
return finish('done')
