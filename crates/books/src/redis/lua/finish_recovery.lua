function verbs.finish_recovery(highest, settled_from)
  if g[SETTLING] == '' then return finish('done') end
  local from = least(g[SETTLING] + SETTLE, FAR_FUTURE)
  local settled = settled_from + 0 >= from
  local function look_at(r)
    if r[SANDBOX] == '' or r[SEEN_AT] == '' or r[SEEN_AT] + 0 < from then settled = false end
  end
  -- What the steps before this one changed is not written down yet.
  for slot in every(records_changed) do record_of(slot) end
  local all = call('HGETALL', books)
  for i = 1, #all, 2 do
    local slot = sub(all[i], 1, 1) == 'r' and sub(all[i], 2)
    if slot and records[slot] == nil then look_at(unpacked(all[i + 1])) end
  end
  for _, r in every(records) do
    if r then look_at(r) end
  end
  if not settled then return finish('recovering') end
  g[NEWEST] = int(most(g[NEWEST], highest, now))
  g[SETTLING], g_changed = '', true
  return finish('done')
end
