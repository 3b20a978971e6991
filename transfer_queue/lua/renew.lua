-- needs: run, full, server, episode
-- ARGV: episode, fence, … Returns the episodes that their fence no longer owns.
local now, lost = now_ms(), {}
for i = 1, #ARGV, 2 do
  if not owned(ARGV[i], ARGV[i + 1], now) then lost[#lost + 1] = ARGV[i] end
end
return lost
