-- ARGV: episode, fence. The episode goes back unharmed, its journal kept.
local e = owned(ARGV[1], ARGV[2])
if e then requeue_episode(ARGV[1], e) end
return e and 1 or 0
