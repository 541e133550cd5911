-- It renews no root.
function verbs.note_seen(slot, seen)
  local r = record_of(slot)
  if not r then return finish('unknown') end
  r[SEEN_AT] = at
  if seen == 'running' then
    r[PAUSED_SINCE] = ''
  elseif seen == 'paused' and not paused_unheard_since(r) then
    r[PAUSED_SINCE] = at
  end
  put(slot, r)
  return finish('done')
end
