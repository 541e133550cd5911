-- slot, bucket, owner, maker, lease, template, ttl; a direct sandbox has no lease
local slot, bucket, owner, maker, lease = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local template, ttl = ARGV[7], ARGV[8]
local direct = lease == ''
local own = record_of(slot)
if own then
  if own[SANDBOX] == '' and own[CONDEMNED_AT] == '' and own[BUCKET] == bucket and own[OWNER] == owner
    and own[MAKER] == maker and (direct and own[MANAGED] == 'direct' or not direct and own[LEASE] == lease) then
    return finish('make', slot, own[GENERATION])
  end
  if direct then return finish('busy') end
end
local b = bucket_of(bucket)
local l = not direct and line_of(bucket, owner)

local function take(_, r)
  r[GENERATION] = mint()
  tell(slot, r, 'taken')
  if not direct then
    tell(slot, r, 'lease', lease)
    r[LEASE], r[TEMPLATE], r[TTL], r[LEASE_BEAT] = lease, template, ttl, at
    l.current = slot
    touch(l)
  end
  count(bucket, 1)
  put(slot, r)
  return finish('make', slot, r[GENERATION])
end

local function ask()
  local managed = direct and 'direct' or 'governor'
  local r = {bucket, owner, managed, '', maker, at, '', '', '', '', '', '', '', '', '', '', '', '', '', '', '', '',
    FAR_FUTURE_TEXT, '', '', '1'}
  return admit(slot, b, r, own, take)
end

if direct or not l.known then return ask() end
if sealed_how(l, lease) then return stale(l) end
if l.current == '' then return ask() end

-- The owner has a lease: renew it, take it over, or replace its sandbox.
local current = l.current
local r = current == slot and own or record_of(current)
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
  return ask()
end
if settling then return finish('recovering') end
if r[TEMPLATE] ~= template then
  condemn(current, r, '', 'replaced')
  return ask()
end
detach(current, r, 's')
r[GENERATION] = mint()
end_run(r)
tell(current, r, 'lease', lease)
r[LEASE], r[TEMPLATE], r[TTL], r[LEASE_BEAT] = lease, template, ttl, at
l.current = current
touch(l)
put(current, r)
return granted(current, r)
