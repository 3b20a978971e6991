-- needs: run, full, server, episode
-- ARGV: episode, fence. Hands a lease back unharmed; one that is already lost is nobody's business.
local member = owned(ARGV[1], ARGV[2], now_ms())
if member then hand_back(ARGV[1], member) end
return 1
