function verbs.adopt_stray(slot, sandbox, bucket, owner, ends_at)
  local r = record_of(slot)
  if r then
    local still_made = r[MAKER] ~= '' and since(r[MAKING_SINCE]) < BLACK
    if r[SANDBOX] ~= '' or still_made then return finish('busy') end
    r[SANDBOX], r[MAKER], r[MAKING_SINCE], r[ENDS_AT], r[SEEN_AT] = sandbox, '', '', ends_at, at
    call('SET', books .. ':s:' .. sandbox, slot)
    put(slot, r)
    return finish('done')
  end
  local b = bucket_of(bucket)
  local room = b[QUOTA] ~= '' and b[QUOTA] - b[USED_HERE] > 0 and (g[CAP] == '' or g[USED] + 0 < g[CAP] + 0)
  local counted = room or g[SETTLING] ~= ''
  r = {bucket, owner, 'governor', mint(), '', '', sandbox, '', '', '', '', '', '', '', '', '', '', '', '', '', '', '',
    ends_at, '', at, counted and '1' or '0'}
  if counted then count(bucket, 1) end
  tell(slot, r, 'adopted', '', '')
  call('SET', books .. ':s:' .. sandbox, slot)
  put(slot, r)
  return finish('done')
end
