-- Steps, one after the other, in one go: the server, then for each step how many arguments it has, its
-- name, and its arguments. Answers with what each says; with nothing where the books do not belong.
local function steps(KEYS, ARGV)
  begin(KEYS)
  if not at_home(ARGV[1]) then return {} end
  local said, place, length = {}, 2, #ARGV
  while place < length do
    local last = place + 1 + ARGV[place]
    said[#said + 1] = verbs[ARGV[place + 1]](values_of(ARGV, place + 2, last))
    place = last + 1
  end
  write_down()
  return said
end
