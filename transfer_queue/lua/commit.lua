-- needs: run, episode, group, steps
-- ARGV: step. Everything of the steps below it is deleted; their payloads are named in `garbage` for a client to sweep.
local step = tonumber(ARGV[1])
if step > run.next_step then
  return refuse('STEP', 'commit of ' .. step .. ': only steps below ' .. run.next_step .. ' were leased')
end
for done = run.committed_step, step - 1 do
  local groups = step_groups(done)
  local episodes = 0
  if done >= run.version then
    episodes = count_trained(groups)
  else
    episodes = weigh(groups)
  end
  count('committed', episodes)
  count('committed_groups', #groups)
  for _, group in ipairs(groups) do
    forget_group((split(group[1])), true)
  end
  call('HDEL', key('steps'), done)
end
call('HSET', RUN, 'committed_step', math.max(step, run.committed_step))
return 1
