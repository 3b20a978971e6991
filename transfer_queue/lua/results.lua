-- needs: run, server, episode
-- ARGV: split. Returns its finished episodes, oldest task first, and how many are still out.
local names, out = {}, 0
for _, task_id in ipairs(call('ZRANGE', key('split:' .. ARGV[1]), 0, -1)) do
  local v = call('HMGET', group_key(task_id), 's0', 'b0')
  if v[2] then names[#names + 1] = task_id .. '#0' end
  if v[1] == 'q' or v[1] == 'l' then out = out + 1 end
end
return {names, out}
