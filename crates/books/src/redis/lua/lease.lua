-- The owner's history of leases, and the end of a lease or a sandbox.
local function line_of(bucket, owner)
  local key = books .. ':l:' .. bucket .. ' ' .. owner
  local l = lines[key]
  if not l then
    local text = call('GET', key)
    l = {key = key, known = text and true or false, current = '', sealed = '', touched = false}
    if text then l.current, l.sealed = match(text, '^([^\t]*)(.*)$') end
    lines[key] = l
  end
  return l
end

local function touch(l)
  l.known = true
  if not l.touched then
    l.touched = true
    lines_changed[#lines_changed + 1] = l
  end
end

local function sealed_how(l, lease)
  if l.sealed == '' then return nil end
  local _, stop = find(l.sealed, '\t' .. lease .. '\n', 1, true)
  return stop and sub(l.sealed, stop + 1, stop + 1)
end

local function seal(l, lease, how)
  if sealed_how(l, lease) then return end
  local _, ended = gsub(l.sealed, '\t', '\t')
  if ended >= SEALED_MAX then l.sealed = match(l.sealed, '^\t[^\t]*(.*)$') end
  l.sealed = l.sealed .. '\t' .. lease .. '\n' .. how
end

local function stale(l)
  local r = l.current ~= '' and record_of(l.current)
  return finish('stale', r and r[GENERATION] or '')
end

local function detach(slot, r, how)
  local lease = r[LEASE]
  if lease == '' then return end
  r[LEASE], r[TEMPLATE], r[TTL], r[LEASE_BEAT] = '', '', '', ''
  local l = line_of(r[BUCKET], r[OWNER])
  if l.current == slot then l.current = '' end
  if how then
    tell(slot, r, 'sealed', lease, how)
    seal(l, lease, how)
  end
  touch(l)
end

local function end_run(r) r[RUN], r[RUN_REPLICA], r[RUN_BEAT], r[RUN_CANCELLED] = '', '', '', '' end

-- How a lease ends with its sandbox; one that was never used is not to blame and asks again.
local function how_of(ground)
  if ground == 'released' then return 'r' end
  if ground == 'replaced' then return 's' end
  if ground == 'never-used' then return nil end
  return 'e'
end

-- Decides the end of a sandbox, for good. The delete gets a generation of its own.
local function condemn(slot, r, by, ground)
  local newest = mint()
  tell(slot, r, 'condemned', by, ground)
  r[CONDEMNED_AT], r[GROUND], r[CONDEMNED_GENERATION] = at, ground, r[GENERATION]
  r[FAILURES], r[AWAKE] = '0', '0'
  r[GENERATION] = newest
  end_run(r)
  detach(slot, r, how_of(ground))
  put(slot, r)
end

-- Frees the slot: the only way a record goes.
local function remove(slot, r, evidence)
  detach(slot, r, evidence ~= 'never-made' and 'e' or nil)
  tell(slot, r, 'freed', evidence, '')
  if r[COUNTED] == '1' then count(r[BUCKET], -1) end
  if r[AWAKE] == '1' then g[AWAKE_ALL], g_changed = g[AWAKE_ALL] - 1, true end
  if r[SANDBOX] == '' then
    forget_trail(slot)
  else
    fading[#fading + 1] = books .. ':a:' .. slot
    fading[#fading + 1] = books .. ':s:' .. r[SANDBOX]
  end
  put(slot, false)
end

local function granted(slot, r)
  local expires_at = r[LEASE_BEAT] + r[TTL]
  if expires_at > FAR_FUTURE then expires_at = FAR_FUTURE end
  return finish('granted', slot, r[SANDBOX] .. ' ' .. r[GENERATION] .. ' ' .. int(expires_at) .. ' ' .. r[ENDS_AT])
end
