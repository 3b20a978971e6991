-- ARGV: step. Batches from there on are as recorded; returns {1, how many} | {-1, error}.
local step, committed, next_step = tonumber(ARGV[1]), metan('committed'), metan('next_step')
if step < committed then
  return {-1, 'step ' .. step .. ' cannot be trained again: steps below ' .. committed .. ' are committed'}
end
return {1, math.max(0, next_step - step)}
