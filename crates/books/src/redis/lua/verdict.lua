-- From evidence to a verdict, as the governor's `colour::verdict` decides it.
local function colour_of(r)
  local colour = 'white'
  local function root(heard_at, ttl)
    local age = since(heard_at)
    if age < ttl + 0 then
      colour = 'black'
    elseif age < ttl + GREY - BLACK and colour == 'white' then
      colour = 'grey'
    end
  end
  if r[MAKER] ~= '' then root(r[MAKING_SINCE], BLACK) end
  if r[LEASE] ~= '' then root(r[LEASE_BEAT], r[TTL]) end
  if r[RUN] ~= '' then root(r[RUN_BEAT], BLACK) end
  if r[LOCK_BY] ~= '' then root(r[LOCK_AT], BLACK) end
  if r[MANAGED] == 'direct' and r[SANDBOX] ~= '' and now < r[ENDS_AT] + 0 then colour = 'black' end
  return colour
end

local function is_overdue(r)
  local due_at = r[ENDS_AT] + 0
  if r[CONDEMNED_AT] ~= '' and r[CONDEMNED_AT] + 0 < due_at then due_at = r[CONDEMNED_AT] + 0 end
  return now > least(due_at + OVERDUE_GRACE, FAR_FUTURE)
end

-- Since when it has been seen paused and its holder has not been heard, or nothing.
local function paused_unheard_since(r)
  if r[PAUSED_SINCE] == '' or r[LEASE] ~= '' and r[PAUSED_SINCE] + 0 <= r[LEASE_BEAT] + 0 then return nil end
  return r[PAUSED_SINCE]
end

-- The ground on which it may go now, or nothing, and its colour.
local function verdict(r, seen, retention)
  if is_overdue(r) then return 'overdue' end
  local colour = colour_of(r)
  if colour ~= 'white' then return nil, colour end
  if r[MANAGED] == 'direct' then return nil, colour end
  if r[LEASE] == '' or r[SANDBOX] == '' or seen == 'running' then return 'white', colour end
  if seen ~= 'paused' or retention == '' then return nil, colour end
  local paused = paused_unheard_since(r)
  if paused and since(paused) > retention + 0 then return 'retention', colour end
  return nil, colour
end
