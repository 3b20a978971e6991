-- needs: run
-- KEYS: the run, then keys of payloads. ARGV: row of `garbage`, how many of the keys are its payload's, …
-- Deletes what is still garbage: a Redis that lost its newest writes with its machine may need it again.
local at = 2
for i = 1, #ARGV, 2 do
  local count = tonumber(ARGV[i + 1])
  if call('SREM', key('garbage'), ARGV[i]) == 1 then
    for k = at, at + count - 1 do call('UNLINK', KEYS[k]) end
  end
  at = at + count
end
return 1
