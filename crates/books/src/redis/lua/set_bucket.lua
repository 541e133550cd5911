function verbs.set_bucket(bucket, quota, retention, runs)
  local b = bucket_of(bucket)
  b[QUOTA], b[RETENTION], b[RUNS] = quota, retention, runs
  buckets_changed[bucket] = true
  return finish('done')
end
