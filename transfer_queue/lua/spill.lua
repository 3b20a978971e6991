-- needs: run, trainer, server, episode, queue, group
-- ARGV: step, episodes of it that are durable in the batch log. Their payloads are named in `garbage`. Returns how many
-- were still held here.
local step, moved = tonumber(ARGV[1]), 0
if step >= run.version then
  return refuse('STEP', 'spill of step ' .. step .. ': version ' .. (step + 1) .. ' is not published')
end
for i = 2, #ARGV do
  local task_id, m = split_episode(ARGV[i])
  local group = group_key(task_id)
  local v = fields_of(group)
  if v.state == 'shipped' and tonumber(v.step) == step and v['b' .. m] then
    free_payload(v, group, ARGV[i], m, true)
    call('HSET', group, 'p' .. m, 1)
    moved = moved + 1
  end
end
count('spilled', moved)
return moved
