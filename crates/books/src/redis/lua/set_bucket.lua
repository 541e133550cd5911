function verbs.set_bucket(bucket, quota, retention)
  local b = bucket_of(bucket)
  b[QUOTA], b[RETENTION] = quota, retention
  buckets_changed[bucket] = true
  return finish('done')
end
