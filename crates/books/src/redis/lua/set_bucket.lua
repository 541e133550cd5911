-- bucket, quota, retention
local bucket = ARGV[2]
local b = bucket_of(bucket)
b[QUOTA], b[RETENTION], b.changed = ARGV[3], ARGV[4], true
return finish('done')
