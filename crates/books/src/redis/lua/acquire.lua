-- A slot's new record, and the lease that begins with it.
local function take(slot, bucket, owner, maker, lease, template, ttl)
  local generation = mint()
  local entry = '\n' .. slot .. ' ' .. at .. ' ' .. bucket .. ' ' .. owner .. '  ' .. generation
  local made_by = ' ' .. generation .. ' ' .. maker .. ' ' .. at
  if lease == '' then
    tell_entry(slot, entry .. ' taken  ')
    put_line(slot, bucket .. ' ' .. owner .. ' direct' .. made_by .. end_of_direct)
  else
    tell_entry(slot, entry .. ' taken  ' .. entry .. ' lease ' .. lease .. ' ')
    put_line(slot, bucket .. ' ' .. owner .. ' governor' .. made_by .. '  ' .. lease .. ' ' .. template .. ' ' .. ttl
      .. ' ' .. at .. end_of_leased)
    local l = line_of(bucket, owner)
    l.current = slot
    touch(l)
  end
  count(bucket, 1)
  return finish('make', slot, generation)
end

-- Takes a slot, or a place in the queue. `own` is what has the slot already.
local function ask(own, slot, bucket, ...)
  return admit(own, slot, bucket) or take(slot, bucket, ...)
end

-- A direct sandbox has no lease.
function verbs.acquire(slot, bucket, owner, maker, lease, template, ttl)
  local direct = lease == ''
  local own = record_of(slot)
  if own then
    if own[SANDBOX] == '' and own[CONDEMNED_AT] == '' and own[BUCKET] == bucket and own[OWNER] == owner
      and own[MAKER] == maker and (direct and own[MANAGED] == 'direct' or not direct and own[LEASE] == lease) then
      return finish('make', slot, own[GENERATION])
    end
    if direct then return finish('busy') end
  end
  if direct then return ask(own, slot, bucket, owner, maker, lease) end
  local l = line_of(bucket, owner)
  if sealed_how(l, lease) then return stale(l) end
  if l.current == '' then return ask(own, slot, bucket, owner, maker, lease, template, ttl) end

  -- The owner has a lease: renew it, take it over, or replace its sandbox.
  local current = l.current
  local r = record_of(current)
  if not r or r[LEASE] == '' then return finish('unknown') end
  if r[CONDEMNED_AT] ~= '' then return finish('being-made') end
  local settling = g[SETTLING] ~= ''
  if r[LEASE] == lease and r[SANDBOX] ~= '' then
    if settling and since(r[LEASE_BEAT]) >= r[TTL] + 0 then return finish('recovering') end
    r[LEASE_BEAT] = at
    put(current, r)
    return granted(current, r)
  end
  if r[SANDBOX] == '' then
    if r[MAKER] ~= '' and since(r[MAKING_SINCE]) < GREY then return finish('being-made') end
    -- The lease that was never answered goes on under the new slot, so it is not sealed.
    detach(current, r, nil)
    put(current, r)
    return ask(own, slot, bucket, owner, maker, lease, template, ttl)
  end
  if settling then return finish('recovering') end
  if r[TEMPLATE] ~= template then
    condemn(current, r, '', 'replaced')
    return ask(own, slot, bucket, owner, maker, lease, template, ttl)
  end
  detach(current, r, 's')
  r[GENERATION] = mint()
  end_run(r)
  tell(current, r, 'lease', lease, '')
  r[LEASE], r[TEMPLATE], r[TTL], r[LEASE_BEAT] = lease, template, ttl, at
  l.current = current
  touch(l)
  put(current, r)
  return granted(current, r)
end
