-- Steps, one after the other, in one go: the server, then for each step how many arguments it has, its
-- name, and its arguments. Answers with what each says; with nothing where the books do not belong.

-- What steps read is read for all of them at once: which of its arguments name a slot, a bucket and,
-- with the bucket, an owner.
local reads = {
  acquire = {2, 3, 4}, return_slot = {2}, bind = {2}, heartbeat = {nil, 2, 3}, release = {nil, 2, 3},
  discard = {2}, run = {3}, begin_removal = {2}, begin_wake = {2}, confirm_gone = {2},
  removal_failed = {2}, expire_making = {2}, adopt_stray = {2, 4}, note_seen = {2}, set_bucket = {nil, 2},
}

local steps = {}
local fields, seen, line_keys = {'g'}, {}, {}
local function read(field)
  if not seen[field] then
    seen[field] = true
    fields[#fields + 1] = field
  end
end
local place = 2
while place <= #ARGV do
  local length = ARGV[place] + 0
  -- Arguments begin at 2, behind the name.
  local step = {}
  for i = 1, length + 1 do step[i] = ARGV[place + i] end
  steps[#steps + 1] = step
  place = place + length + 2
  local what = reads[step[1]]
  if what then
    if what[1] then read('r' .. step[what[1]]) end
    if what[2] then read('b' .. step[what[2]]) end
    -- A sandbox that is made directly has no lease.
    if what[3] and not (step[1] == 'acquire' and step[6] == '') then
      local key = books .. ':l:' .. step[what[2]] .. ' ' .. step[what[3]]
      if not seen[key] then
        seen[key] = true
        line_keys[#line_keys + 1] = key
      end
    end
  end
end

local got = call('HMGET', books, unpack(fields))
if not at_home(got[1]) then return {} end
for i = 2, #fields do
  local field = fields[i]
  local name = sub(field, 2)
  if sub(field, 1, 1) == 'r' then
    records[name] = unpacked(got[i])
  else
    buckets[name] = {match(got[i] or '  0', BUCKET_PATTERN)}
  end
end
if #line_keys > 0 then
  for i, text in ipairs(call('MGET', unpack(line_keys))) do line_from(line_keys[i], text) end
end

local said = {}
for i, step in ipairs(steps) do said[i] = verbs[step[1]](step) end
write_down()
return said
