// Hollow nodes: many kubelets of kubemark in one process. Each is the real kubelet with the fakes of
// kubemark below it, so every pod that is bound to it runs at once and nothing is executed.
//
// kubemark itself has one process for each node. Here they share one, and their connections to the
// API server; their container runtime is called directly instead of over a socket. What is added to
// kubemark's fakes: nodes as large as those with GPUs, and an address of its own for each pod.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/blang/semver/v4"
	cadvisorapi "github.com/google/cadvisor/info/v1"
	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	clientset "k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/version"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	critest "k8s.io/cri-api/pkg/apis/testing"
	"k8s.io/klog/v2"
	cadvisortest "k8s.io/kubernetes/pkg/kubelet/cadvisor/testing"
	"k8s.io/kubernetes/pkg/kubelet/cm"
	"k8s.io/kubernetes/pkg/kubelet/metrics/collectors"
	"k8s.io/kubernetes/pkg/kubemark"
)

const (
	cores      = 96
	memory     = 1 << 40
	disk       = 4 << 40
	maxPods    = 250
	openFiles  = 20_000
	startLimit = time.Minute
	podNetwork = 10<<24 | 77<<16
	// Below it are addresses of nodes.
	firstPod = 256
)

// numPods counts the pods of all nodes of this process, for their addresses.
var numPods atomic.Uint32

type machine struct {
	*cadvisortest.Fake
}

func (m machine) MachineInfo() (*cadvisorapi.MachineInfo, error) {
	info, err := m.Fake.MachineInfo()
	info.NumCores, info.MemoryCapacity = cores, memory
	return info, err
}

type containerManager struct {
	cm.ContainerManager
}

func (containerManager) GetCapacity(bool) v1.ResourceList {
	return v1.ResourceList{v1.ResourceEphemeralStorage: *resource.NewQuantity(disk, resource.BinarySI)}
}

type runtime struct {
	*critest.FakeRuntimeService
}

func (r runtime) RunPodSandbox(
	ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string,
) (string, error) {
	id, err := r.FakeRuntimeService.RunPodSandbox(ctx, config, handler)
	if err != nil {
		return id, err
	}
	r.Lock()
	defer r.Unlock()
	address := podNetwork + firstPod + numPods.Add(1)
	r.Sandboxes[id].Network.Ip = fmt.Sprintf(
		"%d.%d.%d.%d", address>>24, address>>16&255, address>>8&255, address&255)
	return id, nil
}

func newRuntime() runtime {
	service := critest.NewFakeRuntimeService()
	service.FakeStatus = &runtimeapi.RuntimeStatus{Conditions: []*runtimeapi.RuntimeCondition{
		{Type: runtimeapi.RuntimeReady, Status: true},
		{Type: runtimeapi.NetworkReady, Status: true},
	}}
	return runtime{service}
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "file")
	count := flag.Int("nodes", 1, "number of nodes, named node-0 and so on")
	address := flag.String("address", "", "of all nodes; one of this machine")
	labels, devices := cliflag.ConfigurationMap{}, cliflag.ConfigurationMap{}
	flag.Var(&labels, "labels", "of all nodes: KEY=VALUE,...")
	flag.Var(&devices, "devices", "of each node: NAME=QUANTITY,...")
	klog.InitFlags(nil)
	flag.Parse()
	ctx := context.Background()
	capacity := v1.ResourceList{}
	for name, quantity := range devices {
		capacity[v1.ResourceName(name)] = resource.MustParse(quantity)
	}
	for n := range *count {
		name := fmt.Sprintf("node-%d", n)
		if err := start(ctx, *kubeconfig, name, *address, capacity, labels); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			os.Exit(1)
		}
	}
	fmt.Println("started")
	// Ends with its standard input.
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func start(
	ctx context.Context, kubeconfig, name, address string, devices v1.ResourceList,
	labels map[string]string,
) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.UserAgent = "hollow-kubelet"
	config.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := clientset.NewForConfig(config)
	if err != nil {
		return err
	}
	nodeLabels := maps.Clone(labels)
	nodeLabels["kubernetes.io/hostname"] = name
	flags, kubelet := kubemark.GetHollowKubeletConfig(&kubemark.HollowKubeletOptions{
		NodeName: name, MaxPods: maxPods, NodeLabels: nodeLabels,
	})
	flags.NodeIP = address
	// The kubelet's own default. kubemark's 10 s would cost a core for every 500 nodes with 5 pods.
	kubelet.SyncFrequency.Duration = time.Minute
	kubelet.EnableServer = false
	kubelet.StaticPodPath = ""
	kubelet.MaxOpenFiles = openFiles
	heartbeatConfig := *config
	heartbeatConfig.Timeout = kubelet.NodeStatusUpdateFrequency.Duration
	heartbeatConfig.QPS = -1
	heartbeats, err := clientset.NewForConfig(&heartbeatConfig)
	if err != nil {
		return err
	}
	hollow := kubemark.NewHollowKubelet(
		flags, kubelet, client, heartbeats,
		machine{&cadvisortest.Fake{NodeName: name}},
		critest.NewFakeImageService(), newRuntime(),
		containerManager{cm.NewStubContainerManagerWithDevicePluginResource(devices)},
	)
	go hollow.Run(ctx)
	return unregister()
}

// unregister waits until the kubelet that starts has registered the metrics that only one kubelet of
// a process may have, and makes room for those of the next one.
func unregister() error {
	release := semver.MustParse(strings.TrimPrefix(version.Get().GitVersion, "v"))
	for _, each := range []metrics.StableCollector{
		collectors.NewVolumeStatsCollector(nil), collectors.NewLogMetricsCollector(nil),
	} {
		each.Create(&release, each)
		for _, registry := range []prometheus.Registerer{
			legacyregistry.Registerer(), prometheus.DefaultRegisterer,
		} {
			for end := time.Now().Add(startLimit); !registry.Unregister(each); {
				if time.Now().After(end) {
					return fmt.Errorf("has not registered its metrics within %v", startLimit)
				}
				time.Sleep(time.Millisecond)
			}
		}
	}
	return nil
}
