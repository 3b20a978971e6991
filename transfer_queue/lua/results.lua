-- needs: run, episode
-- ARGV: lane. Returns the names of its finished payloads, oldest task first, and how many episodes are still out.
local names, out = {}, 0
for _, task_id in ipairs(call('ZRANGE', key('lane:' .. ARGV[1]), 0, -1)) do
  local v = call('HMGET', group_key(task_id), 's0', 'f0', 'b0')
  if v[3] then names[#names + 1] = payload_name(task_id .. '#0', v[2]) end
  if v[1] == 'q' or v[1] == 'l' then out = out + 1 end
end
return {names, out}
