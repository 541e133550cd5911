-- A replica meets this server: the books begin here, go on, or may have lost their last writes.
-- server, global cap, whether the replica has seen the books before
local function open(KEYS, ARGV)
  begin(KEYS)
  local server, cap, is_known = ARGV[1], ARGV[2], ARGV[3]
  if not at_home(server) then
    if g then
      for _, bucket in each(call('HKEYS', books .. ':n')) do call('DEL', books .. ':q:' .. bucket) end
      call('DEL', books .. ':w', books .. ':h', books .. ':n')
      g[SERVER], g[SETTLING], g[WAITING] = server, at, '0'
    else
      g = {'0', '0', '0', '0', '', is_known == '1' and at or '', server, '0'}
    end
  end
  g[CAP], g_changed = cap, true
  write_down()
  return g[SETTLING]
end
