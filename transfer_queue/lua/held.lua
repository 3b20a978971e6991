-- needs: run, server, episode, queue, group
-- Finished training episodes that are still here: in unfinished and ready groups, and in steps not yet committed.
local names = {}
for _, set in ipairs({'admitted', 'ready'}) do
  for _, task_id in ipairs(call('ZRANGE', key(set), 0, -1)) do
    local v = fields_of(group_key(task_id))
    for m = 0, tonumber(v.size) - 1 do
      if v['b' .. m] then names[#names + 1] = task_id .. '#' .. m end
    end
  end
end
for step = run.committed_step, run.next_step - 1 do
  for _, group in ipairs(cmsgpack.unpack(call('HGET', STEPS, 'batch:' .. step))) do
    for _, episode in ipairs(group) do names[#names + 1] = episode end
  end
end
return names
